"""Private keys are their owner's, and no file is replaced unasked."""

import pytest

from workbench.federation.keys import main, make_node_key


@pytest.mark.parametrize(
    "words, private", [(["node", "node.1"], "node.1"), (["server", ".", "localhost"], "server.key")]
)
def test_a_private_key_is_for_its_owner_and_stays(words, private, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(words)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert (tmp_path / private).stat().st_mode & 0o777 == 0o600 and len(before) == 2
    with pytest.raises(SystemExit, match=f"^{private} exists"):
        main(words)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_server_replaces_its_keys_when_asked(tmp_path):
    for name in ("server.key", "server.pem"):
        (tmp_path / name).write_text("old")
        (tmp_path / name).chmod(0o644)
    main(["server", "--replace", str(tmp_path), "127.0.0.1"])
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600
    assert "old" not in (tmp_path / "server.pem").read_text()


def test_each_node_has_a_public_key_of_its_own(tmp_path):
    names = [make_node_key(tmp_path / name).name for name in ("node.1", "node.2", "node3.key")]
    assert names == ["node.1.pub", "node.2.pub", "node3.pub"]
    (tmp_path / "node4.pub").write_text("a file")
    with pytest.raises(SystemExit, match=r"node4.pub exists"):
        main(["node", str(tmp_path / "node4.key")])
    assert not (tmp_path / "node4.key").exists()


@pytest.mark.parametrize(
    "words, code", [(["nodes", "x"], 2), (["server", "x"], 2), ([], 2), (["--help"], 0)]
)
def test_other_words_are_refused(words, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code and capsys.readouterr()[code > 0].startswith("usage: ")
    assert not any(tmp_path.iterdir())
