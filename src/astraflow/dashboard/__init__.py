"""The page of a run: what goes on, its curves, its rollouts. Mounted into Dataflow by `cli`, or served alone by `astraflow view`."""
