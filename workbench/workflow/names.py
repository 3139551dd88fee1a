"""What DVC runs before a notebook: refuses names in the parameters that a shell could execute.

DVC puts the names of settings, methods, seeds and sweeps into its commands. The first stage refuses
bad ones; a stage that is run alone has only this.
"""

import sys

from stamp_core.config.decode import ParameterError
from workbench.workflow.profiles import check_names, read_profile

if __name__ == "__main__":
    try:
        check_names(read_profile(sys.argv[1]))
    except ParameterError as error:
        sys.exit(f"ParameterError: {error}")
