"""Chromium of a process that is root: it runs as another user, in a network that has only ports of the egress proxy."""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import shutil
import socket
from pathlib import Path

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.util.network import NetworkNamespace, listen

log = logging.getLogger(__name__)

PROGRAMS = ("nsenter", "setpriv", "env")

_SCRIPT = """#!/bin/sh
# Give Chromium a profile that its user may write; the driver's own is root's.
for argument; do
    shift
    case $argument in --user-data-dir=*) argument=--user-data-dir={profile} ;; esac
    set -- "$@" "$argument"
done
umask 077
exec {command} "$@"
"""


class Isolation:
    """A user and a network namespace for the browsers of a pool.

    Browsers reach the ports that `listen` returns, and nothing else that is on this machine or beyond.
    """

    def __init__(self, user: str) -> None:
        """`user`: name or number. Without permission for a namespace there is none. Raises ConfigError."""
        entry = _find_user(user)
        self._uid, self._gid = entry.pw_uid, entry.pw_gid
        missing = [name for name in PROGRAMS if not shutil.which(name)]
        if missing:
            raise ConfigError(
                f"browser.user={user} needs the programs {', '.join(missing)}; install Debian's util-linux"
            )
        self.namespace: NetworkNamespace | None = None
        try:
            self.namespace = NetworkNamespace("browser-network")
        except OSError as error:
            log.warning("browsers run as %s, but in this machine's own network: %s", user, error)

    @classmethod
    def from_config(cls, settings: BrowserConfig) -> Isolation | None:
        """The isolation that browser.user asks for; None without one. Raises ConfigError."""
        return cls(settings.user) if settings.user not in ("", "root") else None

    def listen(self) -> socket.socket:
        """A socket that listens at a loopback address of the browsers' network."""
        return listen(self.namespace)

    def make_home(self, executable: str) -> Path:
        """Make a folder with a `chromium` that starts `executable` isolated; remove it after its end."""
        home = child_process.make_scratch_folder(parent="/tmp")  # TMPDIR is out of reach for other users
        home.chmod(0o711)
        profile = home / "profile"
        profile.mkdir(mode=0o700)
        os.chown(profile, self._uid, self._gid)
        command = ["nsenter", f"--net={self.namespace.path}"] if self.namespace is not None else []
        command += ["setpriv", f"--reuid={self._uid}", f"--regid={self._gid}", "--clear-groups", "--inh-caps=-all"]
        command += ["--no-new-privs", "env", f"HOME={profile}", f"TMPDIR={profile}", executable]
        script = home / "chromium"
        script.write_text(_SCRIPT.format(profile=shlex.quote(str(profile)), command=shlex.join(command)))
        script.chmod(0o755)
        return home

    def close(self) -> None:
        if self.namespace is not None:
            self.namespace.close()


def _find_user(user: str) -> pwd.struct_passwd:
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"browser.user={user} is not a user of this machine; name one, such as nobody") from None
    if entry.pw_uid == 0:
        raise ConfigError(f"browser.user={user} is root under another name; write browser.user=root")
    return entry
