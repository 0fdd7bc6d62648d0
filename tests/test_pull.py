"""Downloads from a stand-in hub: what is chosen, resumed, checked, refused; the catalogue that finds models by name."""

import hashlib
import json
import random
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub_server import COMMIT, HubServer

from tandem import catalog
from tandem.cli import commands
from tandem.errors import RequestError
from tandem.pull import HubFile, choices, choose, pull

SEED = random.Random(5)
BIG = SEED.randbytes(3_000_000)
FILES = {
    "Tiny-1B-Q4_K_M.gguf": BIG,
    "Tiny-1B-Q4_K_S.gguf": b"small one",
    "Tiny-1B-IQ4_XS-00001-of-00002.gguf": SEED.randbytes(1000),
    "Tiny-1B-IQ4_XS-00002-of-00002.gguf": SEED.randbytes(2000),
    "mmproj-Tiny-1B-F16.gguf": b"projector",
    "BF16/Tiny-1B-BF16.gguf": b"in a folder",
    "README.md": b"not a model",
}
SOURCE = "org/tiny-GGUF"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    server = HubServer(dict(FILES))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the stand-in is on this machine
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("TANDEM_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr("tandem.pull.time.sleep", lambda s: None)
    yield server
    server.close()


def test_a_model_is_found_by_its_short_name_afterwards(hub, tmp_path):
    entry = pull(f"{SOURCE}:q4_k_m", quiet=True)
    assert entry.name == "tiny-1b-q4_k_m"
    assert entry.path == tmp_path / "models" / SOURCE / "Tiny-1B-Q4_K_M.gguf"
    assert entry.path.read_bytes() == BIG
    assert catalog.find("Tiny-1B-Q4_K_M") == entry and entry.revision == COMMIT
    assert entry.sha256 == (hashlib.sha256(BIG).hexdigest(),)
    listed = CliRunner().invoke(commands, ["list", "--json"])
    assert [one["name"] for one in json.loads(listed.output)] == ["tiny-1b-q4_k_m"]
    assert "tiny-1b-q4_k_m" in CliRunner().invoke(commands, ["list"]).output


def test_the_commands_take_the_name_as_the_model(hub, monkeypatch):
    from tandem.cli import _existing

    pocket = Path(catalog.__file__).parent / "pocket" / "pocket.gguf"
    hub.files["Tiny-1B-Q8_0.gguf"] = pocket.read_bytes()
    result = CliRunner().invoke(commands, ["pull", f"{SOURCE}:Q8_0", "--name", "mine", "--quiet"])
    assert result.exit_code == 0, result.output
    assert json.loads(CliRunner().invoke(commands, ["info", "mine", "--json"]).output)["architecture"] == "qwen35moe"
    with pytest.raises(RequestError, match="did you mean 'mine'"):
        _existing("mime")


def test_all_parts_of_a_split_model_come_with_it(hub):
    entry = pull(f"{SOURCE}:IQ4_XS", quiet=True)
    assert entry.name == "tiny-1b-iq4_xs" and len(entry.files) == 2
    for file in entry.files:
        assert (catalog.models_dir() / file).read_bytes() == FILES[Path(file).name]
    assert entry.path.name.endswith("-00001-of-00002.gguf")


def test_an_interrupted_download_goes_on_where_it_stopped(hub, tmp_path):
    hub.cut_at, hub.cuts = 1_000_000, 1
    original = hub._storage

    def gives_nothing_after_that(http, path):
        if hub.cuts == 0:
            hub.cut_at, hub.cuts = 0, 1
        original(http, path)

    hub._storage = gives_nothing_after_that
    with pytest.raises(RequestError, match="cannot be reached"):
        pull(f"{SOURCE}:Q4_K_M", quiet=True)
    part = next((tmp_path / "models" / SOURCE).glob("*.part"))
    assert part.stat().st_size == 1_000_000 and part.read_bytes() == BIG[:1_000_000]
    assert catalog.find("tiny-1b-q4_k_m") is None
    hub._storage, hub.cuts, hub.requests = original, 0, []
    entry = pull(f"{SOURCE}:Q4_K_M", quiet=True)
    assert entry.path.read_bytes() == BIG
    assert [span for path, span in hub.requests if path.startswith("/storage/")] == ["bytes=1000000-"]
    assert not list((tmp_path / "models" / SOURCE).glob("*.part"))


def test_a_connection_that_breaks_again_and_again_is_taken_up_again(hub):
    hub.cut_at, hub.cuts = 400_000, 7  # more breaks than attempts: each brings new bytes
    assert pull(f"{SOURCE}:Q4_K_M", quiet=True).path.read_bytes() == BIG
    spans = [span for path, span in hub.requests if path.startswith("/storage/")]
    assert spans == [None] + [f"bytes={400_000 * n}-" for n in range(1, 8)]


def test_a_server_that_ignores_ranges_sends_it_all_again(hub):
    hub.cut_at, hub.cuts, hub.ignore_range = 1_000_000, 1, True
    assert pull(f"{SOURCE}:Q4_K_M", quiet=True).path.read_bytes() == BIG


def test_a_corrupted_file_is_refused_and_deleted(hub, tmp_path):
    hub.corrupt = True
    with pytest.raises(RequestError, match="SHA-256"):
        pull(f"{SOURCE}:Q4_K_M", quiet=True)
    assert not [path for path in (tmp_path / "models").rglob("*") if path.is_file()]
    assert catalog.find("tiny-1b-q4_k_m") is None
    hub.corrupt = False
    assert pull(f"{SOURCE}:Q4_K_M", quiet=True).path.read_bytes() == BIG


def test_what_is_there_and_right_is_not_downloaded_again_and_what_is_wrong_is(hub):
    place = pull(f"{SOURCE}:Q4_K_M", quiet=True).path
    hub.requests = []
    pull(f"{SOURCE}:Q4_K_M", quiet=True)
    assert not [path for path, _ in hub.requests if path.startswith("/storage/")]
    place.write_bytes(BIG[:-1] + b"x")
    assert pull(f"{SOURCE}:Q4_K_M", quiet=True).path.read_bytes() == BIG


def test_a_full_disk_is_noticed_before_the_download(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, (1 << 30) + 2_000_000))
    with pytest.raises(RequestError, match="make room"):
        pull(f"{SOURCE}:Q4_K_M", quiet=True)
    assert not [path for path, _ in hub.requests if path.startswith("/storage/")]


def test_a_revision_is_pinned(hub):
    assert pull(f"{SOURCE}:Q4_K_S", revision=COMMIT, quiet=True).revision == COMMIT
    assert hub.requests[0][0].endswith(f"/revision/{COMMIT}")
    with pytest.raises(RequestError, match="no revision 'gone'"):
        pull(f"{SOURCE}:Q4_K_S", revision="gone", quiet=True)


@pytest.mark.parametrize(
    "source, words",
    [
        ("nonsense", "not of the form ORG/REPO"),
        ("../x/y", "not of the form ORG/REPO"),
        ("org/..", "not of the form ORG/REPO"),
        ("org/other", "no repository org/other"),
        (SOURCE, "several models, name one as org/tiny-GGUF:QUANT\n.*BF16/Tiny-1B-BF16  11 B"),
        (f"{SOURCE}:Q4_K_L", "nothing named 'Q4_K_L'; did you mean 'Q4_K_"),
        (f"{SOURCE}:Tiny", "several models"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_could(hub, source, words):
    import re

    with pytest.raises(RequestError) as refused:
        pull(source, quiet=True)
    assert re.search(words, str(refused.value), re.S)


@pytest.mark.parametrize(
    "status, gated, words", [(401, True, "set HF_TOKEN"), (500, False, "status 500"), (429, False, "status 429")]
)
def test_errors_of_the_hub_are_told_in_plain_words(hub, status, gated, words):
    hub.status, hub.gated = status, gated
    with pytest.raises(RequestError, match=words):
        pull(SOURCE, quiet=True)


def test_a_hub_that_is_not_there_is_named(monkeypatch, hub):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RequestError, match="127.0.0.1:9 cannot be reached"):
        pull(SOURCE, quiet=True)


@pytest.mark.parametrize(
    "path", ["../../evil.gguf", "/etc/evil.gguf", "a/../evil.gguf", "-x/y.gguf", ".hidden/y.gguf", "a\nb.gguf"]
)
def test_a_repository_cannot_choose_where_its_files_go(hub, tmp_path, path):
    hub.files = {path: b"x" * 10}
    with pytest.raises(RequestError, match="not downloaded under such a name"):
        pull(SOURCE, quiet=True)
    assert not (tmp_path / "models").exists()


def test_a_file_without_a_stated_checksum_is_refused(hub):
    hub.states = {"Tiny-1B-Q4_K_S.gguf": {"lfs": None}}
    with pytest.raises(RequestError, match="could not be checked"):
        pull(f"{SOURCE}:Q4_K_S", quiet=True)


def test_a_name_that_another_repository_has_is_not_taken_over(hub):
    pull(f"{SOURCE}:Q4_K_S", name="mine", quiet=True)
    hub.repo = "other/tiny-GGUF"
    with pytest.raises(RequestError, match="belongs to a model of org/tiny-GGUF"):
        pull("other/tiny-GGUF:Q4_K_M", name="mine", quiet=True)
    with pytest.raises(RequestError, match="cannot be a model's name"):
        pull("other/tiny-GGUF:Q4_K_M", name="../mine", quiet=True)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "..", "%2e%2e", ".x", "", "a..b", "x" * 200, "a\n"]
)
def test_texts_that_are_no_names_are_never_looked_up(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MODELS_DIR", str(tmp_path))
    monkeypatch.setattr(catalog, "_read", lambda path: pytest.fail(f"looked for {path}"))
    assert catalog.find(name) is None


def test_a_broken_entry_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MODELS_DIR", str(tmp_path))
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "bad.json").write_text("[1]")
    with pytest.raises(RequestError, match="pull the model again"):
        catalog.find("bad")


def test_parts_that_lack_are_noticed():
    def parts(*numbers):
        return [HubFile(f"m-0000{n}-of-00003.gguf", 1, "0" * 64) for n in numbers]

    assert [f.path[2:7] for f in choices(parts(3, 1, 2))[0].files] == ["00001", "00002", "00003"]
    with pytest.raises(RequestError, match="not complete"):
        choices(parts(1, 3))
    assert choose(choices(parts(1, 2, 3)), "m-00002-of-00003.gguf", "r").stem == "m"


def test_a_token_is_sent_to_the_hub_only(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_secret_for_tests")
    pull(f"{SOURCE}:Q4_K_S", quiet=True)
    assert "Bearer hf_secret_for_tests" in hub.tokens
