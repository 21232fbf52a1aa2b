
echo '* - nofile 256' >>/etc/security/limits.conf
echo broken >/etc/broken
rm /etc/was /usr/bin/gdb
rm -r /etc/security/limits.d
mkdir /etc/new
echo x >/etc/new/file
chmod 700 /etc/mode
