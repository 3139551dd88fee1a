"""The build: parameter files go into the package, so that it works outside a checkout."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithParameters(build_py):
    """Also copies params.yaml and params/ to stamp_core/defaults of what is built."""

    def run(self) -> None:
        """Build the packages, then copy."""
        super().run()
        if self.editable_mode:  # the checkout has them
            return
        for file in [Path("params.yaml"), *sorted(Path("params").glob("*.yaml"))]:
            target = Path(self.build_lib, "stamp_core", "defaults", file)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": BuildWithParameters})
