"""The operations that decide the speed of a step, one implementation per kind of backend."""
