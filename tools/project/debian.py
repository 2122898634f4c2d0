"""Install packages of Debian and Ubuntu, if this user may do so without a password."""

from __future__ import annotations

import os
import shutil
import subprocess

from tools.project.console import Log


def words_of_root() -> list[str] | None:
    """Return the words that make a command run as root. None if this user may not."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo is None or subprocess.run([sudo, "-n", "true"], capture_output=True).returncode != 0:
        return None
    return [sudo, "-n"]


def install(package: str, log: Log) -> bool:
    """Install a package with apt-get.

    Returns:
        Whether it succeeded. False if this is not Debian, or if the user may not install packages.
    """
    if shutil.which("apt-get") is None:
        return False
    root = words_of_root()
    if root is None:
        return False
    log.begin(f"installing {package} (apt-get)")
    log.run([*root, "apt-get", "update"])  # Without it, an older list may still name the package.
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y"]
    if log.run([*root, *quiet, "--no-install-recommends", package]):
        return True
    log.show_end()
    return False
