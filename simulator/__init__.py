"""The simulator room: the engine's own loop and scheduler, in modelled time.

Never imports torch. `simulator.api` is the door for other rooms; `python -m simulator` for people.
"""
