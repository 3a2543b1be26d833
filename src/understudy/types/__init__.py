"""The nouns of the system. Import them from their modules; nothing here has behaviour beyond its data.

prompt.Prompt            one problem to be attempted, with every column of its dataset row
trajectory.Trajectory    what the student wrote: one flat token sequence with aligned per-token streams
scores.ScoreItem         what a teacher is asked;  scores.TeacherScores  what it answers
jagged.Jagged            rows of different lengths as two plain tensors
batch.Batch, BatchMeta   rows ready to train on;   the names of rows, without their data
loss.LossInputs …        what a loss is given;     loss.LossOutput  what it gives back
"""
