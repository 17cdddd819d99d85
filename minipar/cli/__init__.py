"""The command line, `minipar COMMAND`. `minipar train --help` is worth reading.

Whatever a user got wrong ends in one line on stderr and exit code 2; a rank that failed in exit
code 1, with that rank's own traceback where one line cannot say why; a model that fits nowhere in
exit code 3; Ctrl-C in exit code 130. A run that was asked to stop by a signal, and has saved, ends
with 0.
"""

import sys
import tempfile

try:
    tempfile.gettempdir()  # before what draws is imported, which ends without one in many lines
except OSError as error:
    sys.exit(f"minipar: error: {error}; set TMPDIR to a folder that you may write in")
