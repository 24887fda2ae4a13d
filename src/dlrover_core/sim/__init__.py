"""A cluster in a heap: the real engine, and around it simulated nodes, agents, networks and logs, in virtual time.

Months of thousands of nodes in seconds, the same twice from the same plan. What is simulated is the world; what decides is
the code that decides in production.
"""
