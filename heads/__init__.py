"""What Medusa and EAGLE heads share: folders of checkpoints, the frozen target, data, features, the trainer."""
