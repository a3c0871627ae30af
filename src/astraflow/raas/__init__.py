"""RaaS, remote agentic serving: runs workflows against inference engines and hands out their rollouts. No torch on this side."""
