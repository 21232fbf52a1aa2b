
mount -t cgroup -o freezer freezer /mnt || exit 0
for i in $(seq 100); do
    [ -d "/mnt$1" ] || exit 0
    find "/mnt$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.05
done
exit 1
