"""`python -m simulator compile`: the simulator as machine code."""

from __future__ import annotations

import time

from simulator import compiled
from simulator.commands.common import out, plain_errors
from simulator.errors import SpecError


@plain_errors
def compile_core() -> None:
    """Compile the core and the simulator for this machine; `python -m simulator` is faster then.

    Takes about a minute. An edited file is interpreted again, until the next `compile`.
    """
    begun = time.perf_counter()
    try:
        made = compiled.build()
    except compiled.CannotCompile as error:
        raise SpecError(str(error)) from None
    took = f"took {time.perf_counter() - begun:.0f} s" if made else "was there already"
    out.print(f"compiled: {len(compiled.MODULES)} modules in {compiled.place()} ({took}); "
              f"{compiled.SWITCH}=0 turns them off", markup=False)
