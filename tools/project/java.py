"""Find a Java for Spark, or install one."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess

from tools.project import debian
from tools.project.console import Failed, Log

LEAST = 17
PLACES = (
    "/usr/lib/jvm/*/bin/java",
    "/opt/homebrew/opt/openjdk*/bin/java",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java",
)
PACKAGES = ("openjdk-17-jre-headless", "default-jre-headless")
"""Debian 13 does not have Java 17 any more. Its default is a later one."""

MISSING = f"""\
Spark needs Java {LEAST} or later and none was found (JAVA_HOME, PATH, /usr/lib/jvm).
  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless   (or default-jre-headless)
  Fedora:          sudo dnf install java-21-openjdk-headless
  macOS:           brew install openjdk@17"""


def home_of(java: str) -> str | None:
    """Return the home of a ``java`` if its version is 17 or later.

    The command itself is asked, because names and links mislead.
    """
    try:
        done = subprocess.run(
            [java, "-XshowSettings:properties", "-version"], capture_output=True, text=True
        )
    except OSError:
        return None
    settings = dict(re.findall(r"^ *(java\.[\w.]+) = (.*)$", done.stderr, re.MULTILINE))
    version = settings.get("java.specification.version", "0").split(".")[0]
    return settings.get("java.home") if int(version) >= LEAST else None


def find() -> str | None:
    """Return the home of the first suitable Java: JAVA_HOME, the PATH, then usual places."""
    own = os.environ.get("JAVA_HOME")
    candidates = [os.path.join(own, "bin", "java")] if own else []
    candidates += [java for java in [shutil.which("java")] if java]
    candidates += [java for place in PLACES for java in sorted(glob.glob(place))]
    return next((home for java in candidates if (home := home_of(java))), None)


def need(log: Log) -> str:
    """Return the home of a Java, which is installed if there is none.

    Raises:
        Failed: There is no Java, and it could not be installed.
    """
    home = find()
    for package in PACKAGES:
        if home is None and debian.install(package, log):
            home = find()
    if home is None:
        raise Failed(MISSING)
    return home
