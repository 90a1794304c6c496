"""The folder of XLA's compiled programs: one for each machine and setting, never one that cannot be written."""

from pathlib import Path

import pytest

from baton.tasks.foundation.machine.environment import use_xla_cache

FLAG = "--tf_xla_persistent_cache_directory="


def folder_of(environ: dict[str, str], processor: str = "", **settings: object) -> str | None:
    described = Path(environ.get("PROCESSOR", "/none"))
    if processor:
        described.write_text(processor)
    chosen = {"intra": 2, "inter": 2, "deterministic": True, **settings}
    use_xla_cache(environ, processor=described, **chosen)  # type: ignore[arg-type]
    flags = environ.get("TF_XLA_FLAGS", "").split()
    return next((flag.removeprefix(FLAG) for flag in flags if flag.startswith(FLAG)), None)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PROCESSOR": str(tmp_path / "cpuinfo")}


def test_folder_is_in_the_users_cache(environ: dict[str, str], tmp_path: Path) -> None:
    first = folder_of(environ)
    assert first is not None
    assert Path(first).parent == tmp_path / "cache" / "baton" / "xla"
    assert folder_of(environ) == first
    assert environ["TF_XLA_FLAGS"] == f"{FLAG}{first}"
    assert not (tmp_path / "cache").exists()  # only TensorFlow writes, if it compiles


@pytest.mark.parametrize(
    "change", [{"intra": 3}, {"inter": 1}, {"deterministic": False}, {"processor": "flags : avx512\nprocessor : 1\n"}]
)
def test_other_circumstances_have_another_folder(environ: dict[str, str], change: dict[str, object]) -> None:
    first = folder_of(environ, processor="flags : avx2\nprocessor : 0\n")
    assert folder_of(environ, **change) != first  # type: ignore[arg-type]
    assert environ["TF_XLA_FLAGS"].count(FLAG) == 1


def test_xla_flags_and_other_flags_have_another_folder(environ: dict[str, str]) -> None:
    first = folder_of(environ)
    second = folder_of({**environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"})
    third = {**environ, "TF_XLA_FLAGS": "--tf_xla_clustering_debug"}
    assert len({first, second, folder_of(third)}) == 3
    assert third["TF_XLA_FLAGS"].startswith("--tf_xla_clustering_debug ")


@pytest.mark.parametrize("flags", [f"{FLAG}/mine", "/a/file/with/flags"])
def test_choice_of_the_user_is_kept(environ: dict[str, str], flags: str) -> None:
    environ["TF_XLA_FLAGS"] = flags
    folder_of(environ)
    assert environ["TF_XLA_FLAGS"] == flags


def test_folder_can_be_chosen_or_turned_off(environ: dict[str, str], tmp_path: Path) -> None:
    chosen = folder_of({**environ, "BATON_XLA_CACHE": str(tmp_path / "mine")})
    assert chosen is not None
    assert Path(chosen).parent == tmp_path / "mine"
    assert folder_of({**environ, "BATON_XLA_CACHE": ""}) is None
    assert folder_of({**environ, "BATON_XLA_CACHE": "/with a/space"}) is None
    assert folder_of({}) is None


def test_folder_of_the_parent_process_is_replaced(environ: dict[str, str], tmp_path: Path) -> None:
    folder_of(environ)
    environ["BATON_XLA_CACHE"] = str(tmp_path / "mine")
    assert Path(folder_of(environ) or "").parent == tmp_path / "mine"
    environ["BATON_XLA_CACHE"] = ""
    assert folder_of(environ) is None
    assert "TF_XLA_FLAGS" not in environ


def test_folder_that_cannot_be_made_is_not_used(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert folder_of(environ) is None


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"\x0a\x02ab\x1a\x03xyz", True),
        (b"\x0a\x02ab\x1a\x80\x01" + b"x" * 128, True),
        (b"\x0a\x02ab\x1a\x03xy", False),
        (b"\x0a\x02ab\x1a\x80\x01" + b"x" * 127, False),
        (b"\x0a", False),
        (bytes(64), False),
        (b"", False),
    ],
)
def test_torn_programs_are_deleted(environ: dict[str, str], content: bytes, kept: bool) -> None:
    folder = Path(folder_of(environ) or "")
    folder.mkdir(parents=True)
    (folder / "program.pb").write_bytes(content)
    folder_of(environ)
    assert (folder / "program.pb").exists() == kept
