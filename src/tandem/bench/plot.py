"""Draws the report of `tandem bench mtp`: speed with drafts over speed without, by task. Needs matplotlib, an extra."""

from pathlib import Path

from tandem.errors import SettingError


def require(path: str) -> None:
    """Raises SettingError if the plot could not be drawn there, before anything is measured."""
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SettingError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingError("--plot needs matplotlib: pip install matplotlib, or leave out --plot") from None


def draw(report: dict, path: str) -> None:
    """Writes the picture: above the ratios by task and way, below the share of right drafts by position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = {**report["tasks"], "all": report["all"]}
    names = [name for name in report["all"]["ways"] if name != "off"]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, right = figure.subplots(2, 1)
    _bars(speed, tasks, {name: [t["ways"][name]["ratio"] or 0 for t in tasks.values()] for name in names})
    speed.axhline(1, color="black", linewidth=0.8)
    speed.set_ylabel("tokens/s, ratio to off")
    speed.set_title(f"{report['model']}, {report['device']}, {report['threads']} threads")
    positions = range(len(report["all"]["acceptance_by_position"]))
    shares = {
        f"draft {p + 1}": [(t["acceptance_by_position"] + [0] * len(positions))[p] for t in tasks.values()]
        for p in positions
    }
    _bars(right, tasks, shares)
    right.set_ylabel("share of right drafts")
    right.set_ylim(0, 1)
    figure.savefig(path, dpi=110)


def _bars(axes, tasks: dict, groups: dict[str, list[float]]) -> None:
    width = 0.8 / max(len(groups), 1)
    for at, (label, values) in enumerate(groups.items()):
        left = [index + (at - (len(groups) - 1) / 2) * width for index in range(len(tasks))]
        axes.bar(left, values, width, label=label)
    axes.set_xticks(range(len(tasks)), list(tasks))
    if groups:
        axes.legend(ncols=len(groups), fontsize="small", frameon=False)
