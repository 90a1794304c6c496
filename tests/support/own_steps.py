"""Models with a train_step of their own, as Keras's users write them; none is built before its first batch."""

# The text of a user's model.py, after the imports of `lab_of`.
MODELS = '''
def apply(optimizer, tape, loss, weights):
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


def two_layers(width, units, **settings):
    return keras.Sequential([keras.layers.Dense(width, "tanh"), keras.layers.Dense(units)], **settings)


class Codes(keras.Model):
    """Bare x; returns a value and holds no metric."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = two_layers(5, 2), two_layers(5, 6)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x - self.decoder(self.encoder(x))))
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class Pair(keras.Model):
    """Two networks; two optimizers that nobody builds; call makes an image of noise."""

    def __init__(self):
        super().__init__()
        self.judge, self.maker = two_layers(4, 1), two_layers(4, 6)

    def compile(self, judge_optimizer, maker_optimizer, **settings):
        super().compile(**settings)
        self.judge_optimizer, self.maker_optimizer = judge_optimizer, maker_optimizer

    def call(self, noise):
        return self.maker(noise)

    def train_step(self, real):
        noise = real[:, :3] - real[:, 3:]
        with tf.GradientTape() as tape:
            judged = tf.reduce_mean(self.judge(self.maker(noise))) - tf.reduce_mean(self.judge(real))
        apply(self.judge_optimizer, tape, judged, self.judge.trainable_variables)
        with tf.GradientTape() as tape:
            made = -tf.reduce_mean(self.judge(self.maker(noise)))
        apply(self.maker_optimizer, tape, made, self.maker.trainable_variables)
        return {"judge": judged, "maker": made}


class Pupil(keras.Model):
    """Learns from a fixed teacher; only its own variables are trained."""

    def __init__(self):
        super().__init__()
        self.pupil, self.teacher = two_layers(4, 3), two_layers(8, 3, trainable=False)

    def call(self, x):
        return self.pupil(x)

    def train_step(self, data):
        x, y = data
        goal = tf.nn.softmax(self.teacher(x, training=False))
        with tf.GradientTape() as tape:
            found = self.pupil(x, training=True)
            loss = self.compute_loss(x, y, found) + keras.losses.KLDivergence()(goal, tf.nn.softmax(found))
        apply(self.optimizer, tape, loss, self.pupil.trainable_variables)
        return self.compute_metrics(x, y, found)


class Conditioned(keras.Model):
    """The compiled loss is of noise, not of y."""

    def __init__(self):
        super().__init__()
        self.table, self.network = keras.layers.Embedding(3, 2), two_layers(4, 6)

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss(x, self.network(tf.concat([0.5 * x, self.table(y)], axis=1)))
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"noise": loss}

    def test_step(self, data):
        return {"noise": tf.reduce_mean(data[0])}


class Tracked(keras.Model):
    """Returns a metric object's result."""

    def __init__(self):
        super().__init__()
        self.network, self.seen = two_layers(4, 6), keras.metrics.Mean(name="seen")

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(x - self.network(x)))
        apply(self.optimizer, tape, loss, self.network.trainable_variables)
        self.seen.update_state(loss)
        return {"seen": self.seen.result()}


class Weighed(keras.Model):
    """Unpacks sample weights, and branches on a tensor."""

    def __init__(self):
        super().__init__()
        self.network = two_layers(4, 3)

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            found = self.network(x)
            each = keras.losses.sparse_categorical_crossentropy(y, found, from_logits=True)
            loss = tf.reduce_sum(each * weight) / tf.reduce_sum(weight)
            loss = tf.cond(loss > 0.5, lambda: 0.5 * loss, lambda: loss)
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss, "examples": tf.shape(x)[0]}


class Named(keras.Model):
    """Features and labels by name."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(3), keras.layers.Dense(3)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self.left(x["left"]) + self.right(x["right"])
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y["kind"], found, from_logits=True))
        apply(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


class Documented(keras.Model):
    """As in Keras's guide; its metrics are compiled, and of another output than call's."""

    def __init__(self):
        super().__init__()
        self.features, self.head = two_layers(5, 4), keras.layers.Dense(3)

    def call(self, x):
        return self.features(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self.head(self(x, training=True))
            loss = self.compute_loss(y=y, y_pred=found)
        apply(self.optimizer, tape, loss, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {metric.name: metric.result() for metric in self.metrics}


class Wrong(Tracked):
    def train_step(self, x):
        super().train_step(x)
        return self.network(x)


class Idle(Tracked):
    """Has an optimizer that its step never uses."""

    def __init__(self):
        super().__init__()
        self.spare = keras.optimizers.Adam(name="spare")


ACCURACY = "sparse_categorical_accuracy"


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made(kind, *arguments, **settings):
    model = kind()
    model.compile(*arguments, **settings)
    return model


def codes():
    return made(Codes, keras.optimizers.Adam(0.01))


def pair():
    return made(Pair, keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))


def pupil():
    return made(Pupil, keras.optimizers.SGD(0.1), loss=crossentropy(), metrics=[ACCURACY])


def conditioned():
    return made(Conditioned, "rmsprop", loss=keras.losses.MeanSquaredError())


def tracked():
    return made(Tracked, "sgd")


def weighed():
    return made(Weighed, "adam")


def named():
    return made(Named, "adam")


def documented():
    return made(Documented, "adam", loss=crossentropy(), metrics=[ACCURACY])


def wrong():
    return made(Wrong, "sgd")


def idle():
    return made(Idle, "sgd")
'''

# The form of the data of each model.
FORMS = {
    "codes": "alone",
    "pair": "alone",
    "pupil": "plain",
    "conditioned": "plain",
    "tracked": "alone",
    "weighed": "weighted",
    "named": "dicts",
    "documented": "plain",
}
