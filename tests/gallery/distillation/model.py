"""A student that learns from the soft predictions of a larger teacher."""

import keras
from keras import layers, ops


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.teacher.trainable = False

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.3, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        soft = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        distillation = self.distillation_loss_fn(soft, ops.softmax(y_pred / self.temperature, axis=1))
        distillation *= self.temperature**2
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * distillation

    def call(self, x, training=None):
        return self.student(x, training=training)


def network(width, name):
    return keras.Sequential(
        [keras.Input((12,)), layers.Dense(width, activation="relu"), layers.Dropout(0.1), layers.Dense(5)], name=name
    )


def build_model():
    model = Distiller(student=network(8, "student"), teacher=network(64, "teacher"))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
    )
    return model
