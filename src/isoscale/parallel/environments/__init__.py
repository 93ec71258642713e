"""What each way of starting processes tells them in variables of the environment: a module per family."""
