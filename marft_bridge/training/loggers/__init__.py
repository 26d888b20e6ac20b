"""The figures of every update, for TensorBoard, Weights & Biases, MLflow and trackio: `train.loggers`."""
