"""How the drafters of SmolLM2-135M-Instruct were made: instructions, the model's own answers, evaluation."""
