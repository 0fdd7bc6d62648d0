"""Settings: one table for flags, environment and file; who wins; what is refused, and where it says the mistake is."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem.cli import commands
from tandem.errors import SettingError
from tandem.serve.config import ServeConfig, load_config
from tandem.settings import SERVED, SETTINGS, parse_bytes, setting

KEY = "k3y-with-enough-characters"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tandem.toml"

    def write(text):
        path.write_text(text)
        return str(path)

    return write


def load(flags=None, environ=None, path=None, home="/nonexistent"):
    return load_config(flags or {}, {"XDG_CONFIG_HOME": home} | (environ or {}), path)


def test_every_setting_of_the_table_is_a_field_and_a_flag():
    assert [f.name for f in fields(ServeConfig) if f.name != "sources"] == list(SERVED)
    help_text = CliRunner().invoke(commands, ["serve", "--help"]).output
    for spec in SERVED.values():
        if spec.secret:
            assert f"{spec.flag} " not in help_text, "a key on the command line can be read by everybody"
        elif spec.name != "model":
            assert spec.flag in help_text
            assert spec.meaning.split()[0] in help_text


def test_defaults_are_valid_by_their_own_rules():
    config = load()
    assert load({name: getattr(config, name) for name in SERVED if getattr(config, name) != ()}).port == 8080
    assert set(config.sources.values()) == {"default"}


def test_flags_win_over_environment_over_file_over_default(file):
    path = file("port = 1\nmax_queue = 1\nctx = 1\n")
    config = load({"port": "3"}, {"TANDEM_PORT": "2", "TANDEM_MAX_QUEUE": "2"}, path)
    assert (config.port, config.max_queue, config.ctx, config.ping_s) == (3, 2, 1, 15.0)
    assert config.sources["port"] == "--port"
    assert config.sources["max_queue"] == "TANDEM_MAX_QUEUE"
    assert config.sources["ctx"] == f"{path} line 3"
    assert config.sources["ping_s"] == "default"


def test_the_default_file_is_read_if_it_is_there_and_a_named_one_must_be(tmp_path):
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "tandem.toml").write_text("port = 9\n")
    assert load(home=str(tmp_path)).port == 9
    other = tmp_path / "other.toml"
    other.write_text("port = 10\n")
    assert load(home=str(tmp_path), environ={"TANDEM_CONFIG": str(other)}).port == 10
    with pytest.raises(SettingError, match="gone.toml is not there"):
        load(path=str(tmp_path / "gone.toml"))


@pytest.mark.parametrize(
    "flags, environ, text, expected",
    [
        ({"prot": "1"}, {}, "", "unknown setting 'prot'; did you mean 'port'"),
        ({}, {"TANDEM_PROT": "1"}, "", "unknown environment variable TANDEM_PROT; did you mean 'TANDEM_PORT'"),
        ({}, {}, "\n# x\nprot = 1", "line 3: unknown setting 'prot'; did you mean 'port'"),
        ({}, {}, "[port]\nx = 1", "line 1: {'x': 1} for port: a whole number from 0 to 65535 is needed"),
        ({}, {}, "[server]\nport = 1", "line 1: unknown setting 'server'"),
        ({"port": "seven"}, {}, "", "--port: 'seven' for port: a whole number from 0 to 65535 is needed"),
        ({"port": "65536"}, {}, "", "--port: 65536 for port"),
        ({}, {"TANDEM_PORT": "-1"}, "", "TANDEM_PORT: -1 for port"),
        ({}, {}, 'alias = [\n "a",\n "b",\n]\nport = "80"', "line 5: '80' for port: a whole number"),
        ({}, {}, 'alias = [\n "a",\n 3,\n]\n', "line 1: \\('a', 3\\) for alias: a list of texts"),
        ({}, {}, "port = true", "line 1: True for port"),
        ({}, {}, "ping_s = nan", "line 1: nan for ping_s"),
        ({}, {}, 'draft = """\nport = 3\n"""\nport = 1.5', "line 1: .* for draft"),
        ({}, {}, "port = =", "line 1, column"),
        ({}, {}, "max-queue = 1\nmax_queue = 2", "line 2: max_queue is set twice"),
        ({}, {}, "sleep_level = 3", "sleep_level: a whole number from 1 to 2"),
        ({"kv": "q8"}, {}, "", "--kv: 'q8' for kv: one of f16, q8_0, f32 is needed; did you mean 'q8_0'"),
        ({"log_prompts": "maybe"}, {}, "", "true or false"),
        ({"cache_bytes": "8 GiBs"}, {}, "", "a number of bytes such as 8GiB"),
    ],
)
def test_a_mistake_is_refused_and_located(file, flags, environ, text, expected):
    with pytest.raises(SettingError, match=expected.replace("{", "\\{")):
        load(flags, environ, file(text))


def test_the_line_is_that_of_the_key_although_a_text_looks_like_it(file):
    path = file('cache_dir = """\\\nport = 1\\\n"""\nport = 2\n')
    assert load(path=path).sources["port"].endswith("line 4")


def test_values_of_every_kind(file):
    path = file('alias = ["a", "b"]\nlog-prompts = true\ncache_bytes = "1.5GiB"\nsleep_after = 3\n')
    config = load(path=path)
    assert (config.alias, config.log_prompts, config.cache_bytes, config.sleep_after) == (
        ("a", "b"),
        True,
        3 << 29,
        3.0,
    )
    config = load(environ={"TANDEM_ALIAS": "a, b", "TANDEM_LOG_PROMPTS": "yes", "TANDEM_CACHE_BYTES": "4096"})
    assert (config.alias, config.log_prompts, config.cache_bytes) == (("a", "b"), True, 4096)
    assert load({"alias": ("x", "y")}).alias == ("x", "y")


@pytest.mark.parametrize(
    "text, size", [("0", 0), ("12", 12), ("8GiB", 8 << 30), ("8 gb", 8 * 10**9), ("1.5 KiB", 1536)]
)
def test_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1e5", "-1", "1 GG", "9999999999GiB", "0x10"])
def test_no_bytes(text):
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_keys_come_from_file_and_environment_and_are_never_shown(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# mine\n\n{KEY}\n")
    keys.chmod(0o600)
    config = load({"api_key_file": str(keys)}, {"TANDEM_API_KEY": "another-long-key"})
    assert config.api_key == ("another-long-key", KEY)
    assert KEY not in repr(config) and "another" not in repr(config)
    with pytest.raises(SettingError) as refused:
        load({}, {"TANDEM_API_KEY": "sh0rt"})
    assert "sh0rt" not in str(refused.value)
    with pytest.raises(SettingError) as refused:
        load(path=_written(tmp_path, "api_key = 77777777"))
    assert "7777" not in str(refused.value)


def test_key_files_of_others_and_empty_ones_are_refused(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o644)
    with pytest.raises(SettingError, match="chmod 600"):
        load({"api_key_file": str(keys)})
    keys.chmod(0o600)
    keys.write_text("# none\n")
    with pytest.raises(SettingError, match="holds no key"):
        load({"api_key_file": str(keys)})
    with pytest.raises(SettingError, match="cannot be read"):
        load({"api_key_file": str(tmp_path / "gone")})


def test_the_engine_reads_its_settings_from_the_same_table():
    assert setting("threads", {}) == 0
    assert setting("threads", {"TANDEM_THREADS": "3", "TANDEM_PORT": "x"}) == 3
    with pytest.raises(SettingError, match="TANDEM_THREADS: 'two' for threads"):
        setting("threads", {"TANDEM_THREADS": "two"})
    with pytest.raises(SettingError, match="did you mean 'TANDEM_ISA'"):
        setting("threads", {"TANDEM_IS": "avx2"})
    assert {"isa", "threads", "test_models"} <= set(SETTINGS)


def _written(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return str(path)


def test_the_example_file_holds_valid_settings_also_when_its_comments_are_lines(file, tmp_path):
    text = (ROOT / "examples" / "tandem.toml").read_text()
    load(path=file(text))
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    lines = [line.removeprefix("# ") if "=" in line and line[2:3].islower() else line for line in text.splitlines()]
    config = load(path=file("\n".join(lines).replace("/etc/tandem/keys", str(keys))))
    assert config.sleep_level == 2 and config.cache_bytes == 8 << 30 and config.api_key == (KEY,)


def test_the_documentation_names_every_setting():
    text = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in SERVED if f"`{name}`" not in text] == []


def test_variables_in_the_examples_are_settings():
    known = {spec.variable for spec in SETTINGS.values()}
    for name in ("tandem.service", "Containerfile", "tandem.toml"):
        found = set(re.findall(r"TANDEM_[A-Z_]+", (ROOT / "examples" / name).read_text()))
        assert found and found <= known


ROOT = Path(__file__).parents[1]
