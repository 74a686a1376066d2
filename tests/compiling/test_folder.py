"""Folders and files that other users could have written are refused; writes are atomic."""

import os

import pytest

from specjax.compiling.cache import make_private_folder, read_private, write_private


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "cache"
    make_private_folder(path)
    return path


def test_a_folder_is_made_private_and_files_come_back(tmp_path) -> None:
    folder = tmp_path / "deep" / "cache"
    make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    write_private(folder / "a", b"one")
    write_private(folder / "a", b"two")
    assert read_private(folder / "a") == b"two"
    assert read_private(folder / "b") is None
    assert (folder / "a").stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder) == ["a"]  # no temporary file is left


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_refused(folder, mode) -> None:
    folder.chmod(mode)
    with pytest.raises(ValueError, match=rf"{folder} \(mode {mode:04o}\); chmod go-w {folder}"):
        make_private_folder(folder)


def test_a_folder_is_judged_at_every_use(folder, tmp_path) -> None:
    folder.chmod(0o755)  # others may read
    make_private_folder(folder)
    write_private(folder / "a", b"one")
    folder.chmod(0o777)
    for use in (read_private, lambda path: write_private(path, b"")):
        with pytest.raises(ValueError, match="chmod go-w"):
            use(folder / "a")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ValueError, match="symbolic link"):
        make_private_folder(tmp_path / "link")


def test_another_owner_is_refused(folder, monkeypatch) -> None:
    write_private(folder / "a", b"one")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ValueError, match=rf"belongs to user {user}, not to user {user + 1}"):
        read_private(folder / "a")
    with pytest.raises(ValueError, match="use a folder that you own"):
        make_private_folder(folder)


def test_a_file_of_another_owner_is_refused(folder, monkeypatch) -> None:
    """The folder belongs to the user, but the file was moved into it."""
    write_private(folder / "a", b"one")
    user, fstat = os.geteuid(), os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        status = list(fstat(descriptor))
        status[4] = user + 1
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(ValueError, match=rf"a belongs to user {user + 1}"):
        read_private(folder / "a")


def test_anything_but_a_private_file_is_refused(folder, tmp_path) -> None:
    (tmp_path / "other").write_bytes(b"foreign")
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "broken").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "pipe", 0o600)
    (folder / "folder").mkdir()
    write_private(folder / "shared", b"one")
    (folder / "shared").chmod(0o662)
    for name, message in (
        ("link", "symbolic link"),
        ("broken", "symbolic link"),
        ("pipe", None),
        ("folder", None),
        ("shared", "mode 0662"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            read_private(folder / name)


def test_a_failed_write_keeps_the_old_file(folder, monkeypatch) -> None:
    write_private(folder / "a", b"one")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_private(folder / "a", b"two")
    assert read_private(folder / "a") == b"one"
    assert os.listdir(folder) == ["a"]
