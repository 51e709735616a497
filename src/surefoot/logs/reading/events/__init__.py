"""Binary records of steps and scalars: TensorBoard's event files and run files of Weights & Biases."""
