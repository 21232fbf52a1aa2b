{ setsid setpriv --reuid 2000 --regid 2000 --clear-groups sleep 3607 & } </dev/null >/dev/null 2>&1
echo $! >/run/bystanders
{ setsid sleep 3607 & } </dev/null >/dev/null 2>&1
echo $! >>/run/bystanders
sleep 0.3
