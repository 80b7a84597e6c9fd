"""`stateroom doctor`: each check looks at one thing and says pass, note or problem, and what to do.

Nothing is changed, nothing is started but a short process that imports mlx.
"""
