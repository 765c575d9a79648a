"""Run the fault harness: ``python -m tests.faults --kills 200 --write`` (``make faults``)."""

from tests.faults.driver import main

main()
