"""Before a notebook: refuses names in the parameters that DVC's shell could execute."""

import sys

from stamp_core.config.decode import ParameterError
from workbench.workflow.profiles import check_names, read_profile

if __name__ == "__main__":
    try:
        check_names(read_profile(sys.argv[1]))
    except ParameterError as error:
        sys.exit(f"ParameterError: {error}")
