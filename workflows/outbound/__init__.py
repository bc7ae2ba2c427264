"""What workflows ask of the world outside, without being led where they must not go."""
