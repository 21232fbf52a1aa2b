stat -c '%n %F %a %u %g %s' /root/victim /root/dir; sha256sum /root/victim
find /root/dir -mindepth 1 | sort; cat /root/dir/*
