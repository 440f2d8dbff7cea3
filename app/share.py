"""Nobody but the person at this computer reaches the app without a password, by a share link or by the network."""

from __future__ import annotations

import errno
import getpass
import ipaddress
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass

GUEST = "guest"  # the account made up when none is named; it keeps no history on disk, so its holders share none
FIRST_PORT, PORTS_TRIED = 7860, 100


class AccessError(ValueError):
    """A setting of who may connect, and where, that cannot be used; the message says what to do instead."""


@dataclass(frozen=True)
class Access:
    """Who may connect. `accounts` is empty only while `remote` is False.

    remote: other computers can reach the app, through a share link or the network.
    made_up: the password was generated here, so it has to be shown.
    """

    accounts: tuple[tuple[str, str], ...] = ()
    remote: bool = False
    made_up: bool = False

    def __post_init__(self) -> None:
        if self.remote and not self.accounts:
            raise AccessError("other computers could connect without a password: give --auth USER:PASSWORD")


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address to listen on) is reachable from this computer only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def decide(host: str, share: bool, auth: list[str], ask: Callable[[str, bool], str] | None = None) -> Access:
    """The access for these command-line settings.

    auth: `USER:PASSWORD` each. Where a password is needed and none is given, it is asked for with
        `ask(question, hidden)`, and made up when there is nobody to ask (`ask=None`) or the answer is empty.
    Raises AccessError for a malformed account.
    """
    accounts = tuple(_account(text) for text in auth)
    if len({user for user, _ in accounts}) < len(accounts):
        raise AccessError("--auth names the same user twice")
    remote = share or not is_loopback(host)
    if accounts or not remote:
        return Access(accounts, remote)
    user = (ask(f"User name for people who connect [{GUEST}]: ", False).strip() if ask else "") or GUEST
    password = ask("Password [empty: make one up]: ", True) if ask else ""
    return Access(((user, password or secrets.token_urlsafe(12)),), True, made_up=not password)


def ask_terminal(question: str, hidden: bool) -> str:
    return getpass.getpass(question) if hidden else input(question)


def terminal() -> Callable[[str, bool], str] | None:
    """A way to ask the person who started the app, or None when nobody is there to answer."""
    return ask_terminal if sys.stdin is not None and sys.stdin.isatty() else None


def _account(text: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    if not (user.strip() and colon and password):
        raise AccessError("--auth must be USER:PASSWORD, both of them not empty")
    return user.strip(), password


def free_port(host: str, wanted: int | None) -> int:
    """`wanted` if nothing listens there; without a wish the first free port from 7860 on. Raises AccessError."""
    for port in _candidates(wanted):
        try:
            with socket.create_server((host, port), family=_family(host)):
                return port
        except OverflowError as error:
            raise AccessError(f"--port {port} is no port number: choose one from 1024 to 65535") from error
        except PermissionError as error:
            raise AccessError(f"port {port} needs administrator rights: choose one above 1023 with --port") from error
        except socket.gaierror as error:
            raise AccessError(f"--host {host} is no address of this computer") from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise AccessError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    if wanted is not None:
        raise AccessError(
            f"port {wanted} is taken by another program: choose another with --port {wanted + 1}, "
            f"or leave --port out and a free one is found"
        )
    raise AccessError(f"ports {FIRST_PORT} to {FIRST_PORT + PORTS_TRIED - 1} are all taken: choose one with --port")


def _candidates(wanted: int | None) -> Iterator[int]:
    yield from range(FIRST_PORT, FIRST_PORT + PORTS_TRIED) if wanted is None else (wanted,)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def spare_proxy(environment: MutableMapping[str, str]) -> None:
    """Keep the server's check that it answers on this computer away from a proxy that cannot reach it."""
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host for host in environment.get(name, "").split(",") if host]
        environment[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost", "::1"]))


def open_link(host: str, port: int, tunnel: Callable[[str, int, str], str], say: Callable[[str], None]) -> str | None:
    """Open a public link to the app at `host:port`; None, with a plain sentence to `say`, when that is impossible.

    tunnel: `(host, port, token) -> address`, raising anything when it fails.
    """
    say("Opening a public link. What is said passes through Gradio's share service…")
    try:
        url = tunnel(host, port, secrets.token_urlsafe(32))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong out there, the app goes on here
        say(
            f"No public link: the share service cannot be reached ({str(error) or type(error).__name__}). Is there an internet "
            "connection? The app goes on locally; start it with --share again when there is."
        )
        return None
    url = "https://" + url.split("://", 1)[-1]
    say(f"Public link (lasts up to a week): {url}")
    return url


def gradio_tunnel(host: str, port: int, token: str) -> str:
    """The address of a tunnel through Gradio's share service, which sees the traffic."""
    from gradio.networking import setup_tunnel

    return setup_tunnel(host, port, token, None, None)
