"""Every message and route that crosses a process. Data only: no I/O, no policy, no torch."""
