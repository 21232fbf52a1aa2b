"""Who may attach a debugger to a process: Yama and SELinux."""
