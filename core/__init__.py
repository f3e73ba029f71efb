"""The language of a round: types, noise, probabilities, acceptance, trees, protocols, errors.

Everything here is pure and traceable by a compiler; nothing in it depends on a model, a backend or a process.
"""
