"""What DVC runs before a notebook: refuses names in the parameters that a shell could execute.

DVC puts the names of settings, methods, seeds and sweeps into its commands. The first stage refuses
bad ones; a stage that is run alone has only this.
"""

import sys

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import check_names, read_params


def main(profile: str) -> int:
    """The exit status: 1 if a name or a range of seeds of a profile is refused."""
    try:
        check_names(read_params(profile))
    except ParameterError as error:
        print(f"ParameterError: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
