"""What happens if a rank fails, hangs or is stopped, and what keeps the others from waiting for it.

meeting.py                all ranks meet at start-up, and compare configurations and software
answers.py                all ranks get one answer, or one error
failure.py                what a rank reports if it fails
watch.py, hang.py         each rank detects failures of the others, and hangs
watchdog.py               ends a rank in which no thread can run
process_end.py            stop signals, the exit of this process, the end of other processes
fork_server.py            processes that end with the process that started them
"""
