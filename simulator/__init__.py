"""The simulator room: the engine's own loop and scheduler, in modelled time.

Never imports torch. `simulator.api` is the door for other rooms; `python -m simulator` for people.
"""

import os

if os.environ.get("TANDEM_COMPILED") == "1":  # before anything else of it is imported
    from simulator import compiled
    compiled.use()
