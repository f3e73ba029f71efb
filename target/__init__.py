"""The target's side of a round: decoder, law, acceptor and keep as one compiled step, or position by position."""
