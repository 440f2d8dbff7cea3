"""Nobody connects from elsewhere without a password, and what cannot work is said plainly."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app import share
from app.share import Access, AccessError, decide


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("127.0.0.9", True), ("localhost", True), ("::1", True),
    ("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("my-machine", False)])  # fmt: skip
def test_loopback_is_told_apart(host, loopback):
    assert share.is_loopback(host) is loopback


def test_at_this_computer_alone_no_password_is_needed():
    assert decide("127.0.0.1", False, []) == Access()


def test_an_open_app_for_others_cannot_even_be_described():
    with pytest.raises(AccessError, match="--auth USER:PASSWORD"):
        Access((), remote=True)


@pytest.mark.parametrize(("host", "link"), [("127.0.0.1", True), ("0.0.0.0", False), ("192.168.1.5", True)])
def test_others_need_a_password_which_is_made_up_when_nobody_can_be_asked(host, link):
    first, second = decide(host, link, []), decide(host, link, [])
    ((user, password),) = first.accounts
    assert user == share.GUEST and len(password) >= 16 and first.made_up and first.remote
    assert second.accounts[0][1] != password


def test_a_given_or_asked_for_password_is_used():
    assert decide("0.0.0.0", False, ["ada:a:b"]).accounts == (("ada", "a:b"),)
    answers = iter(["grace", "secret"])
    assert decide("127.0.0.1", True, [], lambda question, hidden: next(answers)) == Access((("grace", "secret"),), True)
    empty = decide("127.0.0.1", True, [], lambda question, hidden: "")
    assert empty.accounts[0][0] == share.GUEST and empty.made_up


@pytest.mark.parametrize("auth", [["ada"], ["ada:"], [":secret"], ["ada:x", "ada:y"]])
def test_malformed_accounts_are_refused(auth):
    with pytest.raises(AccessError, match="--auth"):
        decide("127.0.0.1", False, auth)


def test_a_taken_port_is_said_with_the_way_out_and_without_a_wish_the_next_is_found():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AccessError, match=f"port {port} is taken .* --port"):
            share.free_port("127.0.0.1", port)
    with pytest.raises(AccessError, match="no port number"):
        share.free_port("127.0.0.1", 70000)
    with pytest.raises(AccessError, match="no address of this computer|cannot listen"):
        share.free_port("203.0.113.7", 7899)
    first = share.free_port("127.0.0.1", None)
    with socket.create_server(("127.0.0.1", first)):
        assert share.free_port("127.0.0.1", None) > first


def test_a_proxy_is_not_asked_for_this_computer():
    environment = {"HTTP_PROXY": "http://proxy:3128", "no_proxy": "corp.example,localhost"}
    share.spare_proxy(environment)
    share.spare_proxy(environment)
    assert environment["no_proxy"] == "corp.example,localhost,127.0.0.1,::1"
    assert environment["NO_PROXY"] == "127.0.0.1,localhost,::1"


def test_without_internet_the_app_goes_on_and_says_so():
    said: list[str] = []

    def offline(host: str, port: int, token: str) -> str:
        raise RuntimeError("Could not get share link from Gradio API Server.")

    assert share.open_link("127.0.0.1", 7860, offline, said.append) is None
    assert "No public link" in said[-1] and "internet" in said[-1] and "locally" in said[-1]
    link = share.open_link("127.0.0.1", 7860, lambda *_: "http://abc.gradio.live", said.append)
    assert link == "https://abc.gradio.live"
    assert said[-1].endswith("https://abc.gradio.live")


def test_the_command_refuses_bad_settings_before_it_loads_anything():
    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "app", *arguments], capture_output=True, text=True, timeout=60,
                              cwd=Path(__file__).parents[2])  # fmt: skip

    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("--no-browser", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 2 and "is taken by another program" in ended.stderr
    ended = run("--share", "--auth", "nobody")
    assert ended.returncode == 2 and "--auth must be USER:PASSWORD" in ended.stderr and "Traceback" not in ended.stderr
