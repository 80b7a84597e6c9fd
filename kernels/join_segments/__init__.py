"""Joins partial attentions: `reference` defines, `fused` is one kernel."""
