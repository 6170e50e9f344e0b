"""The flight recorder: it stays on for a whole training, and replays the step that was not finite."""
