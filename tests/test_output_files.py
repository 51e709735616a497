"""Output files named by the user: files that surefoot did not write are not replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from surefoot.journal.output_files import OutputRefused, check_output, is_surefoot_output, output_file, save_figure

NOTES = "my notes on surefoot\n"


def write(path: Path, text: str, **options: bool) -> None:
    with output_file(path, **options) as draft:
        draft.write_text(text)


def test_new_file_is_written_without_leftovers(tmp_path: Path) -> None:
    write(tmp_path / "new.html", "page")
    assert [path.name for path in tmp_path.iterdir()] == ["new.html"]


def test_failed_write_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_text(NOTES)
    with pytest.raises(ZeroDivisionError), output_file(path, force=True) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == NOTES
    assert list(tmp_path.iterdir()) == [path]


def test_foreign_files_are_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(NOTES)
    with pytest.raises(OutputRefused, match=r"notes\.txt already exists.*another file, or pass --force"):
        write(path, "page")
    assert path.read_text() == NOTES
    write(path, "page", force=True)
    assert path.read_text() == "page"


def test_empty_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "made.html").touch()
    write(tmp_path / "made.html", "page")
    assert (tmp_path / "made.html").read_text() == "page"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".jpg", ".webp"])
def test_surefoots_figures_are_replaced_and_others_are_not(suffix: str, tmp_path: Path) -> None:
    own_figure, foreign_figure = tmp_path / f"ours{suffix}", tmp_path / f"theirs{suffix}"
    figure = Figure()
    figure.subplots().plot([1, 2])
    save_figure(figure, own_figure)
    save_figure(figure, own_figure)  # an earlier output
    assert is_surefoot_output(own_figure)
    figure.savefig(foreign_figure)
    with pytest.raises(OutputRefused, match="surefoot did not write it"):
        save_figure(figure, foreign_figure)


def test_input_is_never_replaced_under_any_name(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1 loss 2\n")
    os.link(log, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(log)
    for name in ("train.log", "hard", "soft"):
        with pytest.raises(OutputRefused, match="the input file"):
            check_output(tmp_path / name, inputs=[str(log)], force=True)


def test_file_inside_the_input_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    events = tmp_path / "run" / "events.jsonl"
    events.write_text("{}\n")
    with pytest.raises(OutputRefused, match="lies inside the input"):
        check_output(events, inputs=[str(tmp_path / "run")], force=True)
    assert check_output(tmp_path / "run" / "answer.html", inputs=[str(tmp_path / "run")])


def test_devices_pipes_and_folders_are_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path, kind in (
        (Path("/dev/null"), "a device"),
        (tmp_path / "link", "a device"),
        (tmp_path / "pipe", "a pipe"),
        (tmp_path, "a folder"),
        (Path("/dev/stdout"), "a"),
    ):
        with pytest.raises(OutputRefused, match=f"is {kind}"):
            write(path, "page", force=True)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (tmp_path / "link").is_symlink()


def test_link_stays_a_link_and_its_target_is_protected(tmp_path: Path) -> None:
    (tmp_path / "new").symlink_to(tmp_path / "real.html")
    write(tmp_path / "new", "page")
    assert (tmp_path / "new").is_symlink()
    assert (tmp_path / "real.html").read_text() == "page"
    (tmp_path / "notes.txt").write_text(NOTES)
    (tmp_path / "link").symlink_to(tmp_path / "notes.txt")
    with pytest.raises(OutputRefused):
        write(tmp_path / "link", "page")
    assert (tmp_path / "notes.txt").read_text() == NOTES


def test_new_true_replaces_no_file_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("x")
    with pytest.raises(OutputRefused, match="name a new file"):
        check_output(tmp_path / "weights", new=True, force=True)
