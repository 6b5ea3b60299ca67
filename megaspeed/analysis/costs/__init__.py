"""What a run costs, worked out from its configuration alone: memory, traffic. Runs nothing.

Pure arithmetic over shapes; nothing here makes a tensor or imports DeepSpeed.
"""
