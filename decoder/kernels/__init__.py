"""The operations that determine the speed of a step, one implementation per kind of backend."""
