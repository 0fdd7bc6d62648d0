"""`tandem doctor`: every check gives a finding, problems are told with what to do, the exit code says if one is bad."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem import doctor
from tandem.cli import commands
from tandem.doctor import Finding, Report, examine
from tandem.errors import NativeError
from tandem.machine import machine


@pytest.fixture(autouse=True)
def a_quiet_home(tmp_path, monkeypatch):
    """A free port, no configuration of whoever runs the tests, and the bandwidth measured in a small block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TANDEM_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TANDEM_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr(doctor, "_READ_BYTES", 1 << 20)


def found(report: Report, topic: str) -> Finding:
    return next(finding for finding in report.findings if finding.topic == topic)


def test_a_machine_on_which_the_suite_runs_is_healthy():
    report = examine()
    assert report.healthy, report.lines()
    topics = [finding.topic for finding in report.findings]
    for topic in (
        "library",
        "cores",
        "memory",
        "memory speed",
        "huge pages",
        "gpu",
        "configuration",
        "port",
        "models",
        "model",
        "disk",
    ):
        assert topic in topics
    assert found(report, "model").text.startswith("Tandem Pocket with 4096 tokens")
    assert float(found(report, "memory speed").text.split()[0]) > 1.0
    assert report.lines()[-1].startswith("0 would fail")


def test_the_command_prints_lines_or_json_and_its_exit_code_tells(monkeypatch, tmp_path):
    plain = CliRunner().invoke(commands, ["doctor"])
    assert plain.exit_code == 0 and "ok    port: 127.0.0.1:" in plain.output
    bad = tmp_path / "bad.toml"
    bad.write_text("\nprot = 1\n")
    result = CliRunner().invoke(commands, ["doctor", "--config", str(bad), "--json"])
    report = json.loads(result.output)
    assert result.exit_code == 1 and report["healthy"] is False
    wrong = [one for one in report["findings"] if one["level"] == "fail"]
    assert (
        wrong[0]["topic"] == "configuration"
        and "bad.toml line 2: unknown setting 'prot'; did you mean 'port'" in wrong[0]["text"]
    )


def test_a_port_in_use_fails_with_advice(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("TANDEM_PORT", str(taken.getsockname()[1]))
        port = found(examine(), "port")
    assert port.level == "fail" and "in use" in port.text and "another port" in port.advice


def test_a_model_that_does_not_fit_fails_with_advice(monkeypatch):
    small = replace(machine(), free_bytes=10 << 20)
    monkeypatch.setattr(doctor, "machine", lambda: small)
    model = found(examine(), "model")
    assert model.level == "fail" and "10.0 MiB are free" in model.text and "lower ctx" in model.advice


def test_too_many_threads_and_a_worse_library_are_warned_of(monkeypatch):
    monkeypatch.setenv("TANDEM_THREADS", "512")
    monkeypatch.setenv("TANDEM_ISA", "scalar")
    monkeypatch.setattr("tandem.ops.bandwidth.read_bandwidth_gb_s", lambda *_, **__: 3.0)
    report = examine()
    assert report.healthy
    assert found(report, "cores").level == "warn" and "lower TANDEM_THREADS" in found(report, "cores").advice
    assert found(report, "library").level == "warn" or found(report, "library").text.endswith("up to scalar")
    assert found(report, "memory speed").level == "warn"


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch):
    def broken():
        raise NativeError("the library is older than the package, build it again")

    monkeypatch.setattr("tandem.native.native", broken)
    report = examine()
    assert not report.healthy and "build it again" in found(report, "library").text
    assert found(report, "model").level == "ok"


def test_a_broken_model_file_is_a_finding(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    model = found(examine(path), "model")
    assert model.level == "fail" and "broken.gguf" in model.text


def test_cards_are_listed_and_a_silent_driver_is_warned_of(monkeypatch, tmp_path):
    device = tmp_path / "nvidiactl"
    device.write_text("")
    real = Path

    monkeypatch.setattr(doctor, "Path", lambda *parts: device if parts == ("/dev/nvidiactl",) else real(*parts))
    tools = tmp_path / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tools))
    assert [f.advice for f in doctor._gpu()] == ["install the driver's tools"]
    smi.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4070, 12282, 11000, 580.65'\n")
    smi.chmod(0o755)
    assert [f.text for f in doctor._gpu()] == [
        "NVIDIA GeForce RTX 4070, 11000 of 12282 MiB free, driver 580.65; this version computes on the CPU"
    ]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert [f.level for f in doctor._gpu()] == ["warn"]
