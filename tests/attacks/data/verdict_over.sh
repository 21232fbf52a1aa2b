pkill -KILL -f ^her-mounts
grep fuse.sshfs /proc/mounts | while read -r _ path _; do umount -l "$(printf %b "$path")"; done
