"""quantlab: from a model to a table an engineer can act on."""

import sys

__version__ = "0.1.0"

if not (3, 11) <= sys.version_info < (3, 14):
    sys.exit("error: quantlab needs Python 3.11, 3.12 or 3.13; this is %d.%d" % sys.version_info[:2])  # noqa: UP031
