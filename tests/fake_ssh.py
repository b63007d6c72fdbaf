"""Stands where ssh does: runs the remote command here, in a shell, as sshd would; a host named gone* cannot be reached.

What it shows of the path: options come before ``--``, the command is one word for the login shell, stdin goes through.
Each host has a folder for temporary files, so that a test can see that nothing is left there.
"""

import os
import subprocess
import sys

host, command = sys.argv[sys.argv.index("--") + 1 :]
if host.startswith("gone"):
    sys.stderr.write(f"ssh: Could not resolve hostname {host}: Name or service not known\n")
    sys.exit(255)
folder = os.path.join(os.environ["FAKE_SSH_FOLDER"], host)
os.makedirs(folder, exist_ok=True)
environ = {"PATH": os.environ["PATH"] if host != "nopython" else folder, "TMPDIR": folder, "HOME": folder}
if host.startswith("bare"):
    os.symlink("/bin/sh", os.path.join(folder, "sh"))
sys.stdout.write("Welcome to the cluster\n")
sys.stdout.flush()
sys.exit(subprocess.call(["/bin/sh", "-c", command], env=environ))
