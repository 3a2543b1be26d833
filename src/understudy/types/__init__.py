"""The data types of the system, without behaviour beyond their data. Import them from their modules.

prompt.Prompt            one problem to be attempted, with every column of its dataset row
trajectory.Trajectory    what the student wrote: one flat token sequence with aligned per-token streams
scores.ScoreItem         a request to a teacher;   scores.TeacherScores  its reply
jagged.Jagged            rows of different lengths as two plain tensors
batch.Batch, BatchMeta   rows ready to train on;   the names of rows, without their data
loss.LossInputs …        the inputs of a loss;     loss.LossOutput  its result
"""
