"""Folders and files that somebody else could have written are refused; writes are whole."""

import os
import time

import pytest

from specjax.compiling.folder import ABANDONED_SECONDS, PrivateFolder


def test_a_folder_is_made_private_and_files_come_back(tmp_path) -> None:
    folder = PrivateFolder(tmp_path / "deep" / "cache")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.write("a", b"one")
    folder.write("a", b"two")
    assert folder.read("a") == b"two"
    assert folder.read("b") is None
    assert folder.names() == ["a"]
    assert (folder.path / "a").stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder.path) == ["a"]  # no temporary file is left


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"{path} .* \(mode {mode:04o}\); chmod go-w {path}"):
        PrivateFolder(path)


def test_a_folder_that_others_can_read_is_taken(tmp_path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(0o755)
    assert PrivateFolder(path).names() == []


def test_a_folder_that_becomes_writable_is_refused_at_every_use(tmp_path) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    folder.write("a", b"one")
    folder.path.chmod(0o777)
    for use in (lambda: folder.read("a"), lambda: folder.write("a", b""), folder.names):
        with pytest.raises(ValueError, match="chmod go-w"):
            use()


def test_a_link_in_place_of_a_folder_is_refused(tmp_path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match="symbolic link"):
        PrivateFolder(tmp_path / "link")


def test_another_owner_is_refused(tmp_path, monkeypatch) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    folder.write("a", b"one")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ValueError, match=rf"belongs to user {user}, not to user {user + 1}"):
        folder.read("a")
    with pytest.raises(ValueError, match="use a folder of your own"):
        PrivateFolder(tmp_path / "cache")


def test_a_file_that_others_can_write_is_refused(tmp_path) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    folder.write("a", b"one")
    (folder.path / "a").chmod(0o662)
    with pytest.raises(ValueError, match="mode 0662"):
        folder.read("a")


def test_links_pipes_and_folders_in_place_of_a_file_are_refused(tmp_path) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    (tmp_path / "other").write_bytes(b"foreign")
    (folder.path / "link").symlink_to(tmp_path / "other")
    (folder.path / "broken").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder.path / "pipe", 0o600)
    (folder.path / "folder").mkdir()
    for name in ("link", "broken"):
        with pytest.raises(ValueError, match="symbolic link"):
            folder.read(name)
    for name in ("pipe", "folder"):
        with pytest.raises((ValueError, OSError)):
            folder.read(name)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    folder.write("a", b"one")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        folder.write("a", b"two")
    assert folder.read("a") == b"one"
    assert os.listdir(folder.path) == ["a"]


def test_only_old_temporary_files_are_abandoned(tmp_path) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    folder.write("a", b"one")
    for name in (".tmp-old", ".tmp-new"):
        (folder.path / name).touch()
    past = time.time() - ABANDONED_SECONDS - 1
    os.utime(folder.path / ".tmp-old", (past, past))
    os.utime(folder.path / "a", (past, past))
    folder.remove_abandoned()
    assert sorted(os.listdir(folder.path)) == [".tmp-new", "a"]
    assert folder.names() == ["a"]
