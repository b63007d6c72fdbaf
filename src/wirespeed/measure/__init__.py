"""What does happen: links, collectives and steps, measured, with the environment they were measured in."""
