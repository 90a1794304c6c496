import keras
import tensorflow as tf
from data import load, load_validation
from model import build_callbacks, build_model

keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
x, y = load()
model = build_model()
model.fit(
    x,
    y,
    validation_data=load_validation(),
    batch_size=32,
    epochs=20,
    shuffle=False,
    callbacks=[*build_callbacks(), keras.callbacks.CSVLogger("fit.csv")],
    verbose=2,
)
